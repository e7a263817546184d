"""Logs in with a client library and prints how it is refused: LIBRARY BOOTSTRAP MECHANISM USER PASSWORD."""
import re
import sys


def confluent(bootstrap, mechanism, user, password):
    from confluent_kafka import KafkaException, Producer

    refused = []

    def failed(error):
        if error.name() == "_AUTHENTICATION":
            refused.append(error.name() + " " + re.sub(r" \(after .*", "", error.str()))

    producer = Producer({
        "bootstrap.servers": bootstrap, "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism,
        "sasl.username": user, "sasl.password": password, "error_cb": failed, "log_level": 0,
    })
    for _ in range(60):
        try:
            producer.list_topics(timeout=0.5)
            return "served"
        except KafkaException:
            producer.poll(0)
        if refused:
            return refused[0]
    return "no answer"


def kafka_python(bootstrap, mechanism, user, password):
    from kafka import KafkaProducer

    try:
        KafkaProducer(
            bootstrap_servers=bootstrap, security_protocol="SASL_PLAINTEXT", sasl_mechanism=mechanism,
            sasl_plain_username=user, sasl_plain_password=password, bootstrap_timeout_ms=6000,
        ).close()
        return "served"
    except Exception as e:  # the class is what a program sees
        return type(e).__name__


if __name__ == "__main__":
    print({"confluent-kafka": confluent, "kafka-python": kafka_python}[sys.argv[1]](*sys.argv[2:]))
