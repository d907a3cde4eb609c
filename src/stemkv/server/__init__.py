"""The OpenAI-compatible server: one model thread behind Starlette. ``stemkv serve`` starts it."""
