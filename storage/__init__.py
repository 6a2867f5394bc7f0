"""The activation store: schema, codecs, shards, plan, writer, reader and checks. Needs neither torch nor a target."""
