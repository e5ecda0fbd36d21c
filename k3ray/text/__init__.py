"""Text in and out of the model: tokenizer, detokeniser, stop strings, XTML. No torch, no Ray."""
