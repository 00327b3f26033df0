headrace init first && cd first          # a configuration, a tiny base model, sample groups
headrace up --s3 2> up.log &             # Kafka and S3 on this machine
eval "$(headrace env --wait)"            # how to reach them; in other shells, too
headrace topics apply > topics.log
headrace models create my-agent --base-model tiny --learning-rate 1e-3 --groups-per-step 8
headrace worker 2> worker.log &          # trains what arrives, until Ctrl-C
headrace produce groups.jsonl --model my-agent --job   # one step on 16 groups; waits for it
headrace steps my-agent                  # the ledger
headrace inspect my-agent 1              # everything about step 1
headrace replay --model my-agent --steps 1..           # runs it again: equal, bit for bit
headrace models export my-agent exported --merge       # a Hugging Face folder
