"""Groups in, an optimizer step out: tokenize, advantages, pack, loss, DeepSpeed engine, snapshots, weights. It knows no Kafka."""
