"""One run of a job: what is trained, the loop that trains it, what it saves, and where it goes on."""
