"""What a lane's owner does: claim, read, train in turn, commit, give up."""
