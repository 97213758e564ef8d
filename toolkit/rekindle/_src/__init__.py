"""The implementation of the public modules. Private: any release may change it."""
