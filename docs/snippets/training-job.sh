gateway=http://127.0.0.1:8100/v1/preview
model=$(curl -sf $gateway/models -H 'content-type: application/json' \
  -d '{"project": "demo", "name": "my-agent", "base_model": "tiny", "return_existing": true}' | grep -o '"id":"[^"]*' | cut -d'"' -f4)
job=$(curl -sf $gateway/training-jobs -H 'content-type: application/json' -H 'idempotency-key: first' -d '{"model_id": "'$model'",
  "experimental_config": {"learning_rate": 1e-5}, "trajectory_groups": [{"trajectories": [
    {"reward": 1.0, "messages_and_choices": [{"role": "user", "content": "2 + 2?"}, {"finish_reason": "stop", "message": {"content": "4"},
      "prompt_token_ids": [2, 7, 3], "token_ids": [9, 1], "token_logprobs": [-0.7, -0.1]}]},
    {"reward": 0.0, "messages_and_choices": [{"role": "user", "content": "2 + 2?"}, {"finish_reason": "stop", "message": {"content": "5"},
      "prompt_token_ids": [2, 7, 3], "token_ids": [10, 1], "token_logprobs": [-1.2, -0.1]}]}]}]}' | grep -o '"id":"[^"]*' | cut -d'"' -f4)
curl -sf $gateway/training-jobs/$job/events             # training_started, gradient_step, training_ended, once a worker has trained it
curl -sf "$gateway/models/$model/checkpoints?order=desc"
