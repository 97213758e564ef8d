"""Connections between processes: greetings that prove who they are, signed messages, bulk data such as pages."""
