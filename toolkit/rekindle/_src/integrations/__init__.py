"""Sessions in other libraries: trainers and evaluations. Each module needs its library, and a public one opens it."""
