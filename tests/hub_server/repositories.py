"""Account, life cycle and card check."""

import re

import yaml

from hub_server.store import HttpError, now
from hub_server.transport import Transport, route

_FRONT_MATTER = re.compile(r"\s*---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
_RELATIONS = ("adapter", "merge", "quantized", "finetune")


def card_problems(text):
    """Errors and warnings about a README, as the Hub's validate-yaml gives them."""
    match = _FRONT_MATTER.match(text)
    if not match:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(match.group(1))
    except yaml.YAMLError as error:
        return [f"invalid yaml: {error}"], []
    if not isinstance(data, dict):
        return ["metadata should be a mapping"], []
    text_keys = ("license", "library_name", "pipeline_tag", "base_model_relation")
    errors = [f'"{key}" must be a string' for key in text_keys if key in data and not isinstance(data[key], str)]
    if data.get("base_model_relation", "quantized") not in _RELATIONS:
        errors.append(f'"base_model_relation" must be one of {_RELATIONS}')
    base_models = data.get("base_model") or []
    for base in [base_models] if isinstance(base_models, str) else base_models:
        if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", str(base)):
            errors.append(f'"base_model" with value "{base}" is not valid. Use a model id from https://hf.co/models.')
    warnings = []
    if data.get("license") == "other" and not data.get("license_name"):
        warnings.append('license "other" should come with license_name and license_link')
    return errors, warnings


class Repositories(Transport):
    @route("GET", "/api/whoami-v2")
    def whoami(self):
        if not self.user:
            raise HttpError(401, "Invalid username or password.")
        token = {"displayName": "t", "role": self.role}
        who = {"type": "user", "id": self.user, "name": self.user, "fullname": self.user, "orgs": []}
        self.reply(200, who | {"auth": {"type": "access_token", "accessToken": token}})

    @route("POST", "/api/repos/create")
    def create(self):
        body = self.json_body()
        if not self.user:
            raise HttpError(401, "Invalid username or password.")
        owner = body.get("organization") or self.user
        if self.role != "write" or owner != self.user:
            raise HttpError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        kind, repo_id = body.get("type") or "model", f"{owner}/{body['name']}"
        url = f"{self.hub.url}/{'' if kind == 'model' else kind + 's/'}{repo_id}"
        with self.store.lock:
            if f"{kind}/{repo_id}" in self.store.repos:
                return self.reply(409, {"error": "You already created this model repo", "url": url})
            self.store.create(kind, repo_id, body.get("visibility") == "private")
        return self.reply(200, {"url": url, "name": repo_id, "id": repo_id})

    @route("DELETE", "/api/repos/delete")
    def delete(self):
        body = self.json_body()
        kind, repo_id = body.get("type") or "model", f"{body.get('organization') or self.user}/{body['name']}"
        self.need_write(kind, repo_id)
        with self.store.lock:
            del self.store.repos[f"{kind}/{repo_id}"]
            self.store.save()
        self.reply(200, {})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        errors, warnings = card_problems(self.json_body()["content"])
        answer = {
            "errors": [{"message": text} for text in errors],
            "warnings": [{"message": text} for text in warnings],
        }
        self.reply(400 if errors else 200, answer)

    @route("POST", "/api/{type}/{repo}/branch/{rev}")
    def create_branch(self, type, repo, rev):
        body = self.json_body()
        found = self.need_write(type.rstrip("s"), repo)
        with self.store.lock:
            if f"refs/heads/{rev}" in found["refs"]:
                raise HttpError(409, f"Reference already exists: {rev}")
            found["refs"][f"refs/heads/{rev}"] = self.store.resolve(found, body.get("startingPoint") or "main")
            self.store.save()
        self.reply(200, {})

    @route("POST", "/api/{type}/{repo}/tag/{rev}")
    def create_tag(self, type, repo, rev):
        body = self.json_body()
        found = self.need_write(type.rstrip("s"), repo)
        with self.store.lock:
            if f"refs/tags/{body['tag']}" in found["refs"]:
                raise HttpError(409, f"Tag reference exists already: {body['tag']}")
            found["refs"][f"refs/tags/{body['tag']}"] = self.store.resolve(found, rev)
            self.store.save()
        self.reply(200, {})

    def open_pull_request(self, repo, title, parent):
        number = len(repo["prs"]) + 1
        request = {"num": number, "title": title, "ref": f"refs/pr/{number}", "author": self.user, "status": "draft"}
        request["created"] = now()
        repo["prs"].append(request)
        repo["refs"][request["ref"]] = parent
        return request

    @route("POST", "/api/{type}/{repo}/discussions")
    def open_discussion(self, type, repo):
        body = self.json_body()
        found = self.need_write(type.rstrip("s"), repo, pull_request=True)
        with self.store.lock:
            request = self.open_pull_request(found, body["title"], self.store.resolve(found, "main"))
            self.store.save()
        url = f"{self.hub.url}/{repo}/discussions/{request['num']}"
        self.reply(200, {"num": request["num"], "pullRequest": True, "url": url})

    @route("GET", "/api/{type}/{repo}/discussions/(?P<number>\\d+)")
    def discussion(self, type, repo, number):
        request = self.need_read(type.rstrip("s"), repo)["prs"][int(number) - 1]
        about = {"num": request["num"], "title": request["title"], "author": {"name": request["author"]}}
        about |= {"createdAt": request["created"], "status": request["status"], "isPullRequest": True}
        about |= {"repo": {"name": repo, "type": type.rstrip("s")}, "changes": {"base": "refs/heads/main"}}
        self.reply(200, about | {"filesWithConflicts": [], "events": [], "diff": ""})
