// Light or dark as chosen here before, set before anything is drawn. Without a choice: the system's.
"use strict";
try {
  const chosen = localStorage.getItem("kvatlas-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage may be forbidden: then nothing was chosen */ }
