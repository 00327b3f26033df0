"""The trainer worker: lanes, the models on them, their steps and their recovery."""
