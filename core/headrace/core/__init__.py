"""What every process of Headrace stands on: settings, Kafka connection, topic administration, the object store, the local broker."""
