"""A rollout engine over HTTP: OpenAI's chat completions and completions, for every model of one base model."""
