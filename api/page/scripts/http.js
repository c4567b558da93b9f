// Requests to the server over HTTP.

class Failure extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function call(method, path, body) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
  } catch {
    throw new Failure(0, "unreachable", "The server cannot be reached.");
  }
  const data = await response.json().catch(() => ({}));
  if (response.ok) return data;
  if (response.status === 401) askForKey();
  const error = data.error ?? {};
  throw new Failure(response.status, error.code, error.message ?? `The server answered ${response.status}.`);
}

const sessionPath = (id, action = "") => `v1/sessions/${encodeURIComponent(id)}${action}`;
