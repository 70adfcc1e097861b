"""SGLang servers and their clients: a pool of servers, admission of groups, sampling, collection of batches."""
