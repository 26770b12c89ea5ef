"""The server: scheduling, the engine around compiled steps, and HTTP."""
