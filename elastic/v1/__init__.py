"""Generated from protos/elastic/v1 by `make proto`; never edited."""
