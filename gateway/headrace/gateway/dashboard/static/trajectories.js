// Trajectories of a group as chips: index, reward, and by colour which way their advantage pushes.

import { h } from "./dom.js";
import { number } from "./format.js";

/** Chips that lead to `link(index)`; the one with the index `current` is marked. */
export function chips(trajectories, link, current = null) {
  return h(
    "div",
    { class: "chips" },
    trajectories.map((t) => {
      const side = t.advantage > 0 ? "up" : t.advantage < 0 ? "down" : "";
      const said = `trajectory ${t.index}: reward ${number(t.reward)}, advantage ${number(t.advantage)}, ${number(t.trainable_tokens)} trained tokens`;
      return h("a", { class: `chip ${side}`, href: link(t.index), title: said, "aria-current": t.index === current ? "page" : null }, `#${t.index}  ${number(t.reward)}`);
    }),
  );
}
