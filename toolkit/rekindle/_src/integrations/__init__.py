"""Sessions in trainers and evaluations, and tools of servers. Each needs a library, and a public name opens it."""
