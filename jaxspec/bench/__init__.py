"""The body of the command `bench`: verifiers against a floor, drafters against the plain loop."""
