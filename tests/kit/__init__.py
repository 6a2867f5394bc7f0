"""Helpers shared by the tests of several folders. The package contains no tests.

Tests, and processes that tests start, import it as ``moa_data.tests.kit``. Its modules:

Models and data
    ``models`` builds tiny random targets and tokenizers, and ``families`` the targets of all
    families. ``drafters`` builds drafters with random or briefly trained weights. ``gguf_files``
    writes GGUF files. ``templates`` has chat templates, and ``chats`` builds chats and their files.

Stores and runs
    ``stores`` builds stores with known content, without torch. ``training`` builds the store of a
    random Llama. ``runs`` trains on it, and compares runs. ``tree`` lists the files of the checkout.

Commands and processes
    ``command`` runs the command line inside the test's process. ``apart`` runs a function in a
    process of its own, ``ranks`` in several processes that find each other, and ``workers`` in
    worker processes without a target. ``variants`` chooses what runs by default. ``progress``
    passes the progress of a task to a function.

Servers
    ``serving`` serves tiny targets. ``attackers`` has hostile clients, and ``certificates`` what TLS
    needs. ``proxy`` cuts connections. ``hub`` simulates the Hugging Face Hub, ``object_stores`` and
    ``moto_server`` run S3 servers, and ``faults`` makes the network to them fail.

Failures
    ``kills`` ends processes at chosen moments. ``refusals`` and ``disks`` make disks refuse calls,
    or fill up. ``hostile`` changes files at random. ``errors`` checks an error by its class and by
    the facts that its message names, and not by its wording.

Devices and engines
    ``device`` simulates a CUDA device. ``memory`` measures the memory of tensors. ``vllm`` stands in
    for vLLM.
"""
