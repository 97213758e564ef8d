"""What tests share: fakes, small models, drivers."""
