"""What training rows determine: keys, vocabularies, quantiles; rules and labels."""
