// The browser's storage. A private window may refuse to store anything.

const keeper = (store) => ({
  get: (name) => { try { return store().getItem("baton:" + name); } catch { return null; } },
  set: (name, value) => {
    try { value ? store().setItem("baton:" + name, value) : store().removeItem("baton:" + name); } catch { /* not stored */ }
  },
});
const onDevice = keeper(() => localStorage);
const inTab = keeper(() => sessionStorage);
