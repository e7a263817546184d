"""Logs in with a client library and prints how it is refused: LIBRARY BOOTSTRAP MECHANISM USER PASSWORD."""
import sys


def confluent(bootstrap, mechanism, user, password):
    from confluent_kafka import KafkaException, Producer

    seen = set()
    producer = Producer({
        "bootstrap.servers": bootstrap, "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism,
        "sasl.username": user, "sasl.password": password, "error_cb": lambda e: seen.add(e.name()), "log_level": 0,
    })
    try:
        producer.list_topics(timeout=4)
        seen.add("served")
    except KafkaException as e:
        seen.add("raised " + e.args[0].name())
    producer.poll(0)
    return " ".join(sorted(seen))


def kafka_python(bootstrap, mechanism, user, password):
    from kafka import KafkaProducer

    try:
        KafkaProducer(
            bootstrap_servers=bootstrap, security_protocol="SASL_PLAINTEXT", sasl_mechanism=mechanism,
            sasl_plain_username=user, sasl_plain_password=password, bootstrap_timeout_ms=4000,
        ).close()
        return "served"
    except Exception as e:  # the class is what a program sees
        return type(e).__name__


if __name__ == "__main__":
    print({"confluent-kafka": confluent, "kafka-python": kafka_python}[sys.argv[1]](*sys.argv[2:]))
