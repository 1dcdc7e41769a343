import { useState } from "preact/hooks";

export function Login({ message, onEnter }: { message: string; onEnter: (token: string) => void }) {
  const [token, setToken] = useState("");
  return (
    <main class="login">
      <img src="/page/icon.svg" alt="" width="48" height="48" />
      <h1>Flotilla</h1>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (token.trim() !== "") onEnter(token.trim());
        }}
      >
        <label for="token">Token</label>
        <input id="token" type="password" autocomplete="off" autofocus value={token} onInput={(event) => setToken(event.currentTarget.value)} />
        <button class="primary" type="submit">
          Log in
        </button>
        <p class="bad" role="alert">
          {message}
        </p>
      </form>
      <p class="quiet">
        A fleet of your own keeps its token in the file <code>token</code> of its data directory. An operator makes one that only reads with{" "}
        <code>flotilla token create NAME --scope reader</code>. It stays in this tab, and goes with it.
      </p>
    </main>
  );
}
