"""The HTTP door of a supernode: OpenAI's API, health, metrics and the web page on Ray Serve.

Reading order: `api` (requests as values), `generation` (one choice across stacks), `run` (one
HTTP request), `service` (all of them), `routes` (FastAPI), `ray_router` and `app` (Ray).
"""
