"""What Lightning trains: modules, rollouts, loss inputs and validation by decoding."""
