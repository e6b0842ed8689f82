"""flexattn inside of other libraries, which it imports only when they are asked for."""
