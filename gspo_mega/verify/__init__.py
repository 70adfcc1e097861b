"""Commands that check the numbers: certify, mismatch (`gspo-mega budget`), compare, simulate."""
