"""Episodes: what an agent does between a prompt and its reward, with the policy as its model."""
