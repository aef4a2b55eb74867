"""What several test modules share: tiny models, plain reference implementations, known-bad rules."""
