// A figure opens in full size: on a phone its text is too small otherwise.
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("article img:not(.sd-card-img-top)")) {
    image.classList.add("zoom");
    image.addEventListener("click", () => { location.href = image.src; });
  }
});
