"""Connections between processes: greetings that prove their identity, signed messages, bulk data such as pages."""
