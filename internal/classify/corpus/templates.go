package corpus

import "strings"

// Templates of the generator: our own sentences, one a line; \n stands for a
// line's end.
var Templates = func() []string {
	var out []string
	for l := range strings.SplitSeq(strings.TrimSpace(templates), "\n") {
		if l = strings.TrimSpace(l); l != "" {
			out = append(out, strings.ReplaceAll(l, `\n`, "\n"))
		}
	}
	return out
}()

//nolint:misspell // words of other languages
const templates = `
Hi {first}, thanks for your message. Could you call me back at {phone}?\nBest,\n{full}
Dear {person},\n\nYour order has shipped to {address}.\n\nKind regards,\n{full}\n{org}
My name is {person} and I live at {address}.
I'm {person}, please update my address to {address}
Please write an email to {person} about the delay of the {product} project.
Summarize the call with {full} from {org} on {weekday}.
Draft a reply to my landlord {full}, he wants the rent by {weekday}.
Can you translate this letter to {person} into German?
{full} was admitted on {date} with chest pain. Contact: {phone}.
Patient: {full}\nDOB: {date}\nAddress: {address}\nPhone: {phone}
Name: {full}\nEmail: {email}\nPhone: {phone}\nAddress: {address}
name,email,phone\n{full},{email},{phone}\n{full},{email},{phone}
| name | city | phone |\n|---|---|---|\n| {full} | {city} | {phone} |\n| {full} | {city} | {phone} |
{"name": "{full}", "email": "{email}", "address": "{address}"}
{"customer": {"first_name": "{first}", "last_name": "{last}", "phone": "{phone}"}, "total": {n}}
{"query": "orders of {full}", "limit": {n}}
user = User(name="{full}", email="{email}")
INSERT INTO customers (name, street) VALUES ('{full}', '{street}');
# Contact {full} <{email}> before you deploy
// reviewed by {first} on {date}
const owner = "{full}"; // lives at {street}
My wife {first} and I moved to {city} in {year}.
My boss {person} said that {product} is too expensive.
My son {first} is {n} years old and likes {product}.
Ask {first} whether {first} and {first} are coming on {weekday}.
{first} and {first} went to {city} with {full}.
{full} is the CEO of {org}.
{org} hired {full} as head of sales in {year}.
The company was founded by {last}, {last} and {last}.
According to {full}, {org} will open an office in {city}.
{last} said on {weekday} that the deal with {org} was off.
Mr. {last} grew up in {city}.
Mrs. {last} works for {org} in {country}.
Dr. {last} prescribed {n} mg, the follow-up is on {date}.
Prof. {full} teaches history at {org}.
Meet me at {address} at {n} pm.
Please send it to {address}.
Please deliver the parcel to {street}, thanks.
Ship to:\n{full}\n{address}
What's my new address? It's {address}
How do I get from {street} to {street}?
He lives on {street} and works in {city}.
The office of {org} is at {address}.
I want to change the billing address of my card {card} to {address}
we moved from {street} to {street} last year
the party is at {street}, ask for {first}
Our shop: {address}. Open {weekday} to {weekday}.
Is there a bakery near {street}?
The accident happened on {street} near {city}.
Send the invoice to {org}, {address}
{full}\n{org}\n{address}\n{phone}
{org}\n{full}\n{street}\n{city}\n{country}
Best regards,\n{full}\nSenior Manager\n{org}\n{address}\nTel. {phone}
>{full}\n>{org}\n>{address}
{full}\n\n{address}\n{phone} office\n{phone} fax
From: {full} <{email}>\nTo: {full} <{email}>\nSubject: Meeting on {weekday}\n\nHi {first},\nsee you at {n}.\n{first}
{first}: are you there?\n{first}: yes, what's up?
[{first}] can someone review my PR?\n[{first}] sure, on it
@{first} did you see what {person} posted about {org}?
RT @user{n} : {full} just scored again !!! #worldcup
lol {first} is so funny , can't wait for {product}
omg {full} looked great at the {product} last night
listening to {full} all day , best album of {year}
happy birthday {first} !! love u
just saw {full} at {city} airport , crazy
so {first} told {first} that {person} is moving to {city}
who else thinks {last} should be traded before {weekday} ?
Watching the {product} with {first} and {first} tonight
You can tell {full} was a huge {full} fan.
I think {person} is a great actor, but {person} was better in that movie.
The song was written by {full} and produced by {full}.
a film directed by {full} and starring {full} and {full}
{full} plays the lead in the new season of {product}.
The book by {full} was published in {year} in {country}.
Why is {first} always late?
She named her daughter {first}.
They had three kids: {first}, {first} and {first}.
Sometimes people call me {first}.
what's your name? {person}
His name was {person}, hers {person}.
Who is {full}?
{person} is a very nice person.
{person} is from {city}.
Her maiden name is {last}.
The account is under my partner's name {full}
Please transfer {money} from the account of {full}, IBAN {iban}.
Please block my card {card}, the holder is {full}.
My SSN is {ssn} and my name is {full}.
The server {ip} belongs to {person}, mail {email}.
{person}'s phone number is {phone}
{person}'s address is {address}
here's {first}'s address:\n\n{address}
I lost my keys, please tell {person} at {phone}.
Can I speak to {person} please?
Hey {first}! Long time no see, how are {first} and the kids?
Sincerely,\n{full}
Cheers,\n{first}
Thanks {first}
Regards {person}
Attn: {full}\n{org}
Reservation for {last}, {n} people, on {date}.
Passenger {full}, flight to {city} on {date}.
Employee {full} (ID {n}) asked for leave until {date}.
Witness {full} stated that Mr. {last} had left the building on {street}.
The tenant, {full}, residing at {address}, agrees to pay {money}.
Beneficiary: {full}, {address}
Interviewer: Tell us about yourself.\n{first}: I come from {city}.
{full} ({year}) argues that markets are efficient.
Cite {last} et al. ({year}) in the paragraph.
{last} v. {last}, {year}
Meeting notes: {first} will fix the build, {first} writes docs, {person} talks to {org}.
Attendees: {full}, {full}, {full}
Hallo {first}, könntest du mich unter {phone} anrufen? Viele Grüße, {full}
Sehr geehrte Frau {last}, Ihre Bestellung geht an {address}.
Ich heiße {full} und wohne in der {street}.
Herr {last} aus {city} hat sich über {org} beschwert.
Meine Kollegin {full} ist ab {weekday} im Urlaub.
Bonjour {first}, je m'appelle {full} et j'habite au {street}.
Monsieur {last} habite {address}.
Mon mari {first} travaille chez {org}.
Hola {first}, me llamo {full} y vivo en {street}.
La señora {last} vive en {address}.
Mi hermano {first} trabaja en {org}.
Ciao {first}, sono {full}, abito in {street}.
Il signor {last} abita a {city}.
Olá {first}, meu nome é {full} e moro na {street}.
Hallo {first}, ik ben {full} en ik woon op {street}.
Hej {first}, jag heter {full} och bor på {street}.
Hei, nimeni on {full} ja asun osoitteessa {street}.
Cześć {first}, nazywam się {full} i mieszkam na {street}.
Dobrý den, jmenuji se {full} a bydlím na {street}.
Γεια σου {first}, με λένε {full} και μένω {street}.
Меня зовут {full}, я живу на {street}.
Bu mektup {full} için, adres {address}.
Numele meu este {full} și locuiesc pe {street}.
Ime mi je {full}, živim na adresi {street}.
A nevem {full}, a címem {address}.
Nama saya {full}, saya tinggal di {street}.
update my address: {address}
my zip code is {n}
new address is {address}
can you deliver to {address} by {weekday}?
I used to live at {street} in {city}, now at {address}.
Property for sale: {address}, {n} rooms, {money}.
{street} is closed on {weekday} because of the marathon.
Store hours at {street}: {n} to {n}.
Pick up {first} from {street} at {n}:30.
Explain how {product} works.
Write a poem about {city} in {n} lines.
Compare {product} and {product} for a team of {n}.
What is the capital of {country}?
Write a short story about a dragon who lives in {country}.
How do I install {product} on {product}?
Is {org} a good employer?
{org} reported revenue of {money} in {year}.
The stock of {org} rose {n} percent on {weekday}.
Give me {n} ideas for a blog post about gardening.
Plan a trip to {country} and {city} for {n} days.
Which team won the {product} in {year}?
Top {n} Things To Do In {city} This {weekday}
Breaking News : {org} Announces New {product} For {year}
New Blog Post : How To Save Money On {product}
I work at {org} in {city}.
We use {product}, {product} and {product} in production.
Fix this: def load(path): return open(path).read({n})
SELECT name, city FROM users WHERE id = {n} AND status = 'Active';
Solve {n}x + {n} = {n} for x.
A train leaves at {n}:15 and arrives at {n}:40. How long does it take?
Good Morning ! Have A Great {weekday}
Thank God It's {weekday} !!
Can't Wait For The New {product} Movie
The University of {city} offers courses in Biology, Physics and Art History.
In May and June the weather in {city} is fine. Will it rain in April?
The Prime Minister of {country} met the Secretary of State in {city}.
General Relativity and Quantum Mechanics are hard to unite.
Section {n}: Terms and Conditions. The Customer shall pay the Fee to {org}.
Chapter {n}. The House on the Hill
Mark the correct answer with a pen and grant access to the chase.
Will you bill me for the rose and the violet?
Frank feedback is welcome; be honest and patient.
The Christian church in {city} was built in {year}.
Add sugar, vanilla, basil, rosemary and ginger; cook for {n} minutes.
Paris, London and Rome are in Europe; Sydney is not.
Question {n}: Which of the following best describes Photosynthesis?
Translate "Good evening" into Spanish, Italian and Greek.
Ich möchte wissen, wie man {product} auf {product} installiert.
Was ist die Hauptstadt von {country}?
Die Bundesregierung hat am {weekday} ein Gesetz beschlossen.
Wie lange dauert der Flug von {city} nach {city}?
Quelle est la capitale de {country} ?
¿Cuál es la capital de {country}?
Qual è la capitale di {country}?
Ποια είναι η πρωτεύουσα της {country};
Какая столица у {country}?
It takes {n} days to deliver from {country}.
I drive {n} miles to work every day on the highway.
There are {n} ways to do this, pick one.
The room is on floor {n} of the building, next to the court.
We walked down the road to the square and sat in the park.
Version {n}.{n} of {product} was released in {year}.
Step {n}: open the {product} app and tap Settings, then General.
`
