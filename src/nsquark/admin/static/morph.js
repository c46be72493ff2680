// Makes one element like another by changing only what differs, so that focus, selection and scroll positions stay.

// Custom elements draw themselves from their attributes, so their children are left alone.
const isSelfDrawn = (element) => element.localName.includes("-");

function morphAttributes(current, wanted) {
  for (const { name } of [...current.attributes]) {
    if (!wanted.hasAttribute(name) && !(name === "open" && current.localName === "details")) current.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (current.getAttribute(name) !== value) current.setAttribute(name, value);
  }
}

export function morphChildren(current, wanted) {
  const theirs = [...wanted.childNodes];
  const ours = [...current.childNodes];
  theirs.forEach((node, index) => {
    if (index < ours.length) morph(ours[index], node);
    else current.append(node);
  });
  ours.slice(theirs.length).forEach((node) => node.remove());
}

export function morph(current, wanted) {
  if (current.nodeType !== wanted.nodeType || current.nodeName !== wanted.nodeName) {
    current.replaceWith(wanted);
  } else if (current.nodeType === Node.ELEMENT_NODE) {
    morphAttributes(current, wanted);
    if (!isSelfDrawn(current)) morphChildren(current, wanted);
  } else if (current.nodeValue !== wanted.nodeValue) {
    current.nodeValue = wanted.nodeValue;
  }
}

// The HTML comes from our own templates, which escape every value.
export function parse(html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  return template.content;
}
