import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

/** A question over the page: what it does is said on its button, and what went wrong stays in it. */
export function Dialog(props: {
  title: string;
  verb: string;
  isDangerous?: boolean;
  onDo: () => Promise<void>;
  onClose: () => void;
  children: ComponentChildren;
}) {
  const box = useRef<HTMLDialogElement>(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    box.current?.showModal();
  }, []);
  const act = async () => {
    setBusy(true);
    setError("");
    try {
      await props.onDo();
      props.onClose();
    } catch (reason) {
      setError(reason instanceof Error ? reason.message : String(reason));
      setBusy(false);
    }
  };
  return (
    <dialog ref={box} onClose={props.onClose} aria-labelledby="dialog-title">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void act();
        }}
      >
        <h2 id="dialog-title">{props.title}</h2>
        {props.children}
        {error && (
          <p class="bad" role="alert">
            {error}
          </p>
        )}
        <div class="buttons end">
          <button type="button" onClick={props.onClose}>
            Cancel
          </button>
          <button type="submit" class={props.isDangerous ? "danger" : "primary"} disabled={isBusy}>
            {props.verb}
          </button>
        </div>
      </form>
    </dialog>
  );
}
