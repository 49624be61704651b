const button = document.getElementById("zoom");
if (button) {
  const words = ["Let each step fill the width", "All on one time axis"];
  button.hidden = false;
  button.textContent = words[0];
  button.addEventListener("click", () => {
    const fit = document.getElementById("timelines").classList.toggle("fit");
    for (const plot of document.querySelectorAll("#timelines svg.plot"))
      plot.setAttribute("width", fit ? plot.dataset.fit : plot.dataset.shared);
    button.textContent = words[fit ? 1 : 0];
    button.setAttribute("aria-pressed", String(fit));
  });
}
