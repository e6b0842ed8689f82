"""One call of flex_attention, validated and traced: Call -> Problem."""
