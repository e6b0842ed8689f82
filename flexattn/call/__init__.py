"""One call of flex_attention: its arguments, validated and traced, as a Problem."""
