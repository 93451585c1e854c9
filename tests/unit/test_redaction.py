"""What nobody should send to others is replaced, and the rest of a text stays."""

import json

import pytest

from fallow.redaction import Redaction, mask_secrets, secret_values

REDACT = Redaction(
    secrets=["hunter2hunter2", 'quo"ted\\secret', "1", "hunter2hunter2-and-more"],
    homes=["/home/alice", "/gpfs/home/alice", "/", ""],
    users=["alice", "root", "", "1000"],
)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("x hunter2hunter2-and-more hunter2hunter2", "x *** ***"),
        (json.dumps({"line": 'quo"ted\\secret'}), '{"line": "***"}'),
        ("/gpfs/home/alice/x /home/alice: /home/alice-2/y", "~/x ~: /home/USER/y"),
        ("/scratch/alice/run of Alice's malice, alice_gpu", "/scratch/USER/run of USER's malice, USER_gpu"),
        (json.dumps("one\nalice"), r'"one\nUSER"'),
        ("in /home/bob/data on gpu01", "in /home/USER/data on gpu01"),
        ('{"seq": 1000, "by": "root", "path": "/"}', '{"seq": 1000, "by": "root", "path": "/"}'),
    ],
)
def test_known_secrets_homes_and_users_are_replaced(text: str, left: str) -> None:
    assert REDACT(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "rediss://fallow:SECRET@redis:6379/0",
        "https://SECRET@github.com/x",
        "rediss://:SECRET/with@odd@redis:6379",
        "DB_PASSWORD=SECRET",
        "export HF_TOKEN='SECRET with blanks'",
        '{"api_key": "SECRET, and more", "step": 3}',
        r'"{\"secret_key\": \"SECRET\"}"',
        "wandb login --api-key SECRET",
        "huggingface-cli login --token SECRET",
        "['wandb', 'login', '--api-key', 'SECRET']",
        r'{"text": "[\"x\", \"--token\", \"SECRET\"]"}',
        json.dumps(["--password", "SECRET"], indent=2),
        "os.environ['HF_TOKEN'] = 'SECRET'",
        "connect(password=b'SECRET')",
        "https://host/x?token=SECRET",
        "https://host/x?Y=1&X-Amz-Signature=SECRET",
        "https://host/x?sv=1&sig=SECRET",
        "MYSQL_PWD=SECRET",
        "DB_PASS=SECRET",
        "key AIzaSECRETSECRET",
        "curl -H 'Authorization: Basic SECRET=='",
        "sent Bearer SECRETSECRET",
        "token hf_SECRETSECRETSECRET",
        "-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----\n",
        "-----BEGIN CERTIFICATE-----\nSECRET",
        "SECRET\n-----END RSA PRIVATE KEY-----\nloss",
        r"-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    masked = mask_secrets(text)
    assert "SECRET" not in masked and "***" in masked


@pytest.mark.parametrize(
    "text",
    [
        '{"token": "train-1.b0", "tokens": 4096, "loss_per_token": 0.25}',
        "token=train-1.h3 max_tokens=2048 bos_token_id=1",
        "tcp://10.0.0.1:19000 and http://host:80/path",
        "forward_pass=3 min-secretion x, a non-secret text, --max-tokens 5",
        '["--lr", "0.1", "--epochs", "3"]',
        "basic training, a key decision; passed",
    ],
)
def test_words_of_training_stay(text: str) -> None:
    assert mask_secrets(text) == text


def test_the_environment_names_its_secrets() -> None:
    environ = {"MY_SECRET": "a", "AWS_ACCESS_KEY_ID": "b", "MYSQL_PWD": "c", "SLURM_JWT": "d"}
    plain = {"PWD": "/x", "SSH_AUTH_SOCK": "/y", "FALLOW_TOKEN": "train-1.b0", "LANG": "C"}
    assert secret_values(environ | plain) == {"a", "b", "c", "d"}
