"""The engine's HTTP surface: OpenAI's chat completions and completions."""
