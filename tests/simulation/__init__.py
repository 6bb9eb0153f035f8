"""All orders of the calls of two workers and a relay, with one fault anywhere.

The workers and the relay are the real ones. A process is a function of the answers that its ports have given so far: it is run up to
its next call once for each history of answers, and its calls are played on a model of the database and the broker.
"""
