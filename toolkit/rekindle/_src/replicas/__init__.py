"""Replicas: sessions in processes of their own behind one object, which routes requests and survives their deaths."""
