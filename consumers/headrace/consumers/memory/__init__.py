"""What a lane's owner knows between two commits, and what a commit writes of it."""
