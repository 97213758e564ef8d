"""A cache that many machines share, behind the cache folder of each: a folder, or an object store by its URL."""
