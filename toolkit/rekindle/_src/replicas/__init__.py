"""Replicas: sessions in processes of their own, used as one object, which routes requests and survives their deaths."""
