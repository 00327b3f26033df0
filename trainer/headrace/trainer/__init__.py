"""Groups in, an optimizer step out: tokenize, advantages, pack, loss, DeepSpeed engine, snapshots, weights. A library that knows no Kafka."""
