"""Weight versions, their manifests, and the store that holds them."""
