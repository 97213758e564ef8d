"""The engine: scheduler and policies (pure host code), step programs, and the runner that dispatches them."""
