"""What lies behind the public modules. Private: any release may change it."""
