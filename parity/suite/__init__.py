"""The checks as pytest, against any port: thin, one test a check, case and dtype."""
