"""`headrace demo`: a small agent gets better while its trajectories travel over a real Kafka, with one command."""
